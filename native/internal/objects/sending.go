package objects

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
)

// Said is what control answered in place of what was asked for.
type Said struct {
	Status  int
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (s *Said) Error() string {
	if s.Code == "" {
		return fmt.Sprintf("control answered %d", s.Status)
	}
	return fmt.Sprintf("control answered %s: %s", s.Code, s.Message)
}

const saidBytesMax = 16 << 10

// said reads a refusal; what is none of control's, of a proxy in between, has no code.
func said(response *http.Response) *Said {
	what := &Said{}
	content, err := io.ReadAll(io.LimitReader(response.Body, saidBytesMax))
	if err != nil || json.Unmarshal(content, what) != nil {
		what = &Said{}
	}
	what.Status = response.StatusCode
	return what
}

func below(address, path string) string { return strings.TrimRight(address, "/") + "/agent/v1/" + path }

// Send has control take something small or great, and reads its answer. It may be repeated: another replica is asked where one does not
// answer. Errors: *Said; what the network says.
func (c *Control) Send(ctx context.Context, method, path string, header http.Header, content []byte) ([]byte, error) {
	var failed error
	for _, address := range c.settings.URLs {
		answer, err := c.send(ctx, method, below(address, path), header, content)
		var refusal *Said
		if err == nil || (errors.As(err, &refusal) && refusal.Status < http.StatusInternalServerError) {
			return answer, err
		}
		failed = err
	}
	return nil, failed
}

func (c *Control) send(ctx context.Context, method, address string, header http.Header, content []byte) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, method, address, bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	for name, values := range header {
		request.Header[name] = values
	}
	request.Header.Set("Authorization", "Bearer "+c.settings.Credential)
	response, err := c.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode >= http.StatusMultipleChoices {
		return nil, said(response)
	}
	return io.ReadAll(io.LimitReader(response.Body, 4<<20))
}

// PutAt sends an object to where control says that it belongs. The link is a secret for as long as it is good: no error names it.
func (c *Control) PutAt(ctx context.Context, link string, content []byte) error {
	where, err := url.Parse(link)
	if err != nil || where.Host == "" || (where.Scheme != "https" && where.Scheme != "http") || where.User != nil {
		return errors.New("control names a place that is none")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, where.String(), bytes.NewReader(content))
	if err != nil {
		return errors.New("control names a place that is none")
	}
	response, err := c.elsewhere.Do(request)
	if err != nil {
		var of *url.Error
		if errors.As(err, &of) {
			err = of.Err
		}
		return fmt.Errorf("the store at %s: %w", where.Host, err)
	}
	response.Body.Close()
	if response.StatusCode >= http.StatusMultipleChoices {
		return fmt.Errorf("the store at %s answered %d", where.Host, response.StatusCode)
	}
	return nil
}
