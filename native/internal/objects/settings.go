package objects

import "errors"

// Settings choose where objects are: in a folder, or (to read them) at control.
type Settings struct {
	Folder  string           `json:"folder,omitempty"`
	Control *ControlSettings `json:"control,omitempty"`
}

// Open has the store that settings choose; it talks to nobody yet.
func Open(settings Settings) (Store, error) {
	if settings.Control != nil || settings.Folder == "" {
		return nil, errors.New("an object store that is written to is a folder")
	}
	return OpenFolder(settings.Folder), nil
}

// OpenReader is Open for those who only read.
func OpenReader(settings Settings) (Reader, error) {
	if settings.Control != nil {
		return OpenControl(*settings.Control)
	}
	return Open(settings)
}
