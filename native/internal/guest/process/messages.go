package process

import "atoll.local/native/internal/guest/rpc"

// The messages of process.Process (contract file process.proto), as proto3 JSON.

type processConfig struct {
	Cmd  string            `json:"cmd"`
	Args []string          `json:"args,omitempty"`
	Envs map[string]string `json:"envs,omitempty"`
	Cwd  *string           `json:"cwd,omitempty"`
}

type terminal struct {
	Size *terminalSize `json:"size"`
}

type terminalSize struct {
	Cols rpc.Uint32 `json:"cols"`
	Rows rpc.Uint32 `json:"rows"`
}

func (t *terminal) dimensions() (cols, rows uint32) {
	if t.Size == nil {
		return 0, 0
	}
	return uint32(t.Size.Cols), uint32(t.Size.Rows)
}

type startRequest struct {
	Process *processConfig `json:"process"`
	Pty     *terminal      `json:"pty"`
	Tag     *string        `json:"tag"`
	Stdin   *bool          `json:"stdin"`
}

type selector struct {
	PID *rpc.Uint32 `json:"pid"`
	Tag *string     `json:"tag"`
}

// selected is the part that all requests about one process share.
type selected struct {
	Process *selector `json:"process"`
}

type updateRequest struct {
	selected
	Pty *terminal `json:"pty"`
}

type input struct {
	Stdin *rpc.Bytes `json:"stdin"`
	Pty   *rpc.Bytes `json:"pty"`
}

type inputRequest struct {
	selected
	Input *input `json:"input"`
}

type streamInputRequest struct {
	Start *selected `json:"start"`
	Data  *struct {
		Input *input `json:"input"`
	} `json:"data"`
	Keepalive *struct{} `json:"keepalive"`
}

type signalRequest struct {
	selected
	Signal any `json:"signal"`
}

type empty struct{}

type processInfo struct {
	Config processConfig `json:"config"`
	PID    uint32        `json:"pid"`
	Tag    *string       `json:"tag,omitempty"`
}

type listResponse struct {
	Processes []processInfo `json:"processes"`
}

type eventResponse struct {
	Event event `json:"event"`
}

type event struct {
	Start     *startEvent `json:"start,omitempty"`
	End       *endEvent   `json:"end,omitempty"`
	Keepalive *empty      `json:"keepalive,omitempty"`
}

type startEvent struct {
	PID uint32 `json:"pid"`
}

type endEvent struct {
	ExitCode int32   `json:"exitCode"`
	Exited   bool    `json:"exited"`
	Status   string  `json:"status"`
	Error    *string `json:"error,omitempty"`
}
