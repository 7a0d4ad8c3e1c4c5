package files

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"atoll.local/native/internal/guest/identity"
	"atoll.local/native/internal/guest/settings"
	"atoll.local/native/internal/guest/threads"
	"atoll.local/native/internal/guest/users"
)

func FuzzSignature(f *testing.F) {
	f.Add("path=f&signature=v1_x", "read", "tok")
	f.Add("signature=&signature_expiration=-1&username=u", "write", "t")
	f.Add("signature_expiration=99999999999999999999", "read", "t")
	f.Fuzz(func(t *testing.T, raw, operation, token string) {
		query, err := url.ParseQuery(raw)
		if err != nil || token == "" || strings.Contains(raw, "v1_") {
			return
		}
		// Whatever a stranger writes without the prefix of a signature is refused.
		if checkSignature("", query, operation, settings.Secret(token), time.Unix(0, 0)) == nil {
			t.Fatalf("%q was admitted", raw)
		}
	})
}

func FuzzAcceptEncoding(f *testing.F) {
	for _, header := range []string{"", "gzip", "gzip;q=0, identity;q=0", "*;q=0", "a;;q=x,", "identity;q=0,*"} {
		f.Add(header)
	}
	f.Fuzz(func(t *testing.T, header string) {
		encoding, err := acceptedEncoding(header)
		if err != nil {
			// Only who refuses something gets nothing.
			if !strings.Contains(header, "0") {
				t.Fatalf("%q: %v", header, err)
			}
			return
		}
		if encoding != "" && encoding != gzipEncoding {
			t.Fatalf("%q: %q", header, encoding)
		}
		if encoding == gzipEncoding && !strings.Contains(strings.ToLower(header), "gzip") && !strings.Contains(header, "*") {
			t.Fatalf("%q: gzip was not asked for", header)
		}
		_, _ = contentEncoding(header)
	})
}

func FuzzFileName(f *testing.F) {
	f.Add(`form-data; name="file"; filename="/a/b ü"`)
	f.Add(`form-data; filename*=UTF-8''%2fetc%2fpasswd`)
	f.Add(`;;;="`)
	f.Fuzz(func(t *testing.T, disposition string) {
		if name, err := fullFileName(disposition); err == nil && name == "" {
			t.Fatalf("%q has no name", disposition)
		}
	})
}

func TestFileNamesKeepTheirDirectories(t *testing.T) {
	for disposition, want := range map[string]string{
		`form-data; name="file"; filename="/home/user/a b.txt"`:         "/home/user/a b.txt",
		`form-data; name="file"; filename="rel/ative"`:                  "rel/ative",
		`form-data; name="file"; filename="quo\"te"`:                    `quo"te`,
		`form-data; name="file"; filename*=UTF-8''dir%2Fgr%C3%BC%C3%9F`: "dir/grüß",
	} {
		if got, err := fullFileName(disposition); err != nil || got != want {
			t.Errorf("%s: %q %v", disposition, got, err)
		}
	}
}

// FuzzRange serves a small file for any Range header: never more than the file, never a crash.
func FuzzRange(f *testing.F) {
	dir := f.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			f.Fatal(err)
		}
	}
	write("passwd", "user:x:1:1::"+dir+":\n")
	write("group", "")
	write("file", "0123456789")
	store := &settings.Store{}
	store.Replace(&settings.Values{DefaultUser: "user"})
	who := &identity.Identity{Users: users.NewDirectory(filepath.Join(dir, "passwd"), filepath.Join(dir, "group")), Settings: store}
	served := New(who, threads.NewSlots(1), time.Now)
	for _, header := range []string{"bytes=0-3", "bytes=-1", "bytes=5-", "bytes=0-0,2-3", "bytes=99-", "x", "bytes=9-1", "bytes=-99999999999999999999"} {
		f.Add(header)
	}
	f.Fuzz(func(t *testing.T, header string) {
		r := httptest.NewRequest("GET", "/files?path=file", nil)
		r.Header["Range"] = []string{header}
		r.Header["Accept-Encoding"] = []string{"gzip"}
		w := httptest.NewRecorder()
		served.Download(w, r)
		body := w.Body.String()
		switch w.Code {
		case http.StatusOK:
			if header != "" && body != "0123456789" {
				t.Fatalf("%q: %q", header, body)
			}
		case http.StatusPartialContent:
			if !strings.HasPrefix(w.Header().Get("Content-Type"), "multipart/") && !strings.Contains("0123456789", body) {
				t.Fatalf("%q: %q", header, body)
			}
		case http.StatusRequestedRangeNotSatisfiable:
		default:
			t.Fatalf("%q: %d %q", header, w.Code, body)
		}
	})
}
