package guest

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func query(pairs ...string) string {
	values := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		values.Set(pairs[i], pairs[i+1])
	}
	return "?" + values.Encode()
}

// put uploads raw bytes.
func (b *box) put(path string, content string, headers ...string) (int, string) {
	b.t.Helper()
	r := b.request("POST", "/files"+query("path", path), strings.NewReader(content))
	r.Header.Set("Content-Type", "application/octet-stream")
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return b.do(r)
}

// form uploads files under their own names, in one multipart body.
func (b *box) form(target string, files ...[2]string) (int, string) {
	b.t.Helper()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	for _, f := range files {
		// CreateFormFile would escape as browsers do; this is what the SDKs send.
		part, err := form.CreatePart(map[string][]string{"Content-Disposition": {`form-data; name="file"; filename="` + f[0] + `"`}})
		must(b.t, err)
		_, _ = io.WriteString(part, f[1])
	}
	must(b.t, form.WriteField("other", "ignored"))
	must(b.t, form.Close())
	r := b.request("POST", target, &body)
	r.Header.Set("Content-Type", form.FormDataContentType())
	return b.do(r)
}

func (b *box) fetch(path string, headers ...string) (*http.Response, string) {
	b.t.Helper()
	r := b.request("GET", "/files"+query("path", path), nil)
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := b.client.Do(r)
	must(b.t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	must(b.t, err)
	return response, string(body)
}

func owner(t testing.TB, path string) (uid, gid uint32, mode os.FileMode) {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	st := info.Sys().(*syscall.Stat_t)
	return st.Uid, st.Gid, info.Mode().Perm()
}

func TestUploadMakesParentsOfTheUser(t *testing.T) {
	b := newBox(t)
	status, body := b.put("a/b/c.txt", "hello")
	want := fmt.Sprintf(`[{"path":"%s/a/b/c.txt","name":"c.txt","type":"file"}]`, b.home)
	if status != 200 || body != want {
		t.Fatalf("%d %s", status, body)
	}
	for path, mode := range map[string]os.FileMode{"a": 0o755, "a/b": 0o755, "a/b/c.txt": 0o644} {
		if uid, gid, got := owner(t, b.home+"/"+path); uid != userUID || gid != userGID || got != mode {
			t.Errorf("%s: %d:%d %o", path, uid, gid, got)
		}
	}
	// As root the file becomes root's, its relative path starts at root's home.
	r := b.request("POST", "/files"+query("path", "~/r", "username", "root"), strings.NewReader("x"))
	r.Header.Set("Content-Type", "application/octet-stream; charset=binary")
	if status, body := b.do(r); status != 200 || !strings.Contains(body, b.root+"/root/r") {
		t.Fatalf("%d %s", status, body)
	}
	// An overwritten file changes its owner and loses its old end.
	must(t, os.WriteFile(b.home+"/old", []byte("something longer"), 0o600))
	if status, body := b.put("old", "new"); status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	content, _ := os.ReadFile(b.home + "/old")
	if uid, _, mode := owner(t, b.home+"/old"); uid != userUID || mode != 0o600 || string(content) != "new" {
		t.Fatalf("%d %o %q", uid, mode, content)
	}
}

func TestUploadForms(t *testing.T) {
	b := newBox(t)
	status, body := b.form("/files", [2]string{"x/one", "1"}, [2]string{b.root + "/home/two ü", "22"}, [2]string{"", ""})
	if status != 400 || !strings.Contains(body, "filename is missing") {
		t.Fatalf("%d %s", status, body)
	}
	status, body = b.form("/files", [2]string{"x/one", "1"}, [2]string{b.root + "/home/two ü", "22"})
	var got []map[string]string
	must(t, json.Unmarshal([]byte(body), &got))
	if status != 200 || len(got) != 2 || got[0]["path"] != b.home+"/x/one" || got[1]["name"] != "two ü" {
		t.Fatalf("%d %s", status, body)
	}
	if content, _ := os.ReadFile(b.home + "/two ü"); string(content) != "22" {
		t.Fatalf("%q", content)
	}
	// With ?path the file's own name does not count.
	if status, body = b.form("/files"+query("path", "named"), [2]string{"whatever", "n"}); status != 200 || !strings.Contains(body, b.home+"/named") {
		t.Fatalf("%d %s", status, body)
	}
	if status, body = b.form("/files"+query("path", "twice"), [2]string{"a", "1"}, [2]string{"b", "2"}); status != 400 ||
		!strings.Contains(body, "you cannot upload multiple files to the same path '"+b.home+"/twice'") {
		t.Fatalf("%d %s", status, body)
	}
	if status, body = b.form("/files"); status != 200 || body != "[]" {
		t.Fatalf("%d %s", status, body)
	}
}

func TestUploadRefusals(t *testing.T) {
	b := newBox(t)
	must(t, os.Mkdir(b.home+"/dir", 0o755))
	must(t, os.WriteFile(b.home+"/file", nil, 0o644))
	must(t, unix.Mkfifo(b.home+"/fifo", 0o666))
	for _, c := range []struct {
		path, contentType, username string
		status                      int
		message                     string
	}{
		{"dir", "application/octet-stream", "", 400, "path is a directory: " + b.home + "/dir"},
		{"fifo", "application/octet-stream", "", 400, "path is not a regular file: " + b.home + "/fifo"},
		{"file/below", "application/octet-stream", "", 400, "error ensuring directories: path is a file: " + b.home + "/file"},
		{"file/b/c", "application/octet-stream", "", 400, "error ensuring directories: path is a file: " + b.home + "/file"},
		{"x", "text/plain", "", 400, "unsupported content type: text/plain, expected multipart/form-data or application/octet-stream"},
		{"x", "", "", 400, "unsupported content type: , expected multipart/form-data or application/octet-stream"},
		{"x", "application/octet-stream", "ghost", 401, "error looking up user 'ghost': user: unknown user ghost"},
		{"~other/x", "application/octet-stream", "", 400, "cannot expand user-specific home dir"},
		{"a\x00b", "application/octet-stream", "", 400, "NUL"},
		{"x", "multipart/form-data", "", 400, "error parsing multipart form"},
		{"x", "multipart/mixed; boundary=x", "", 400, "unsupported content type"},
	} {
		r := b.request("POST", "/files"+query("path", c.path, "username", c.username), strings.NewReader("content"))
		r.Header.Set("Content-Type", c.contentType)
		status, body := b.do(r)
		var e struct {
			Code    int
			Message string
		}
		_ = json.Unmarshal([]byte(body), &e)
		if status != c.status || e.Code != c.status || !strings.Contains(e.Message, c.message) {
			t.Errorf("%q %q: %d %s", c.path, c.contentType, status, body)
		}
	}
	r := b.request("POST", "/files", strings.NewReader("x"))
	r.Header.Set("Content-Type", "application/octet-stream")
	if status, body := b.do(r); status != 400 || body != `{"code":400,"message":"path query parameter is required for raw body upload"}` {
		t.Fatalf("%d %s", status, body)
	}
}

func TestGzipBothWays(t *testing.T) {
	b := newBox(t)
	content := strings.Repeat("compressible ", 10_000)
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, _ = io.WriteString(w, content)
	must(t, w.Close())
	if status, body := b.put("packed", packed.String(), "Content-Encoding", "gzip"); status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	if got, _ := os.ReadFile(b.home + "/packed"); string(got) != content {
		t.Fatalf("%d bytes", len(got))
	}
	if status, _ := b.put("broken", "not gzip", "Content-Encoding", "gzip"); status != 400 {
		t.Fatal(status)
	}
	if status, body := b.put("broken", packed.String()[:packed.Len()/2], "Content-Encoding", "gzip"); status != 400 {
		t.Fatalf("%d %s", status, body)
	}
	if _, err := os.Stat(b.home + "/broken"); err == nil {
		t.Fatal("half a new file was left")
	}
	if status, body := b.put("x", "x", "Content-Encoding", "br"); status != 400 || !strings.Contains(body, "unsupported Content-Encoding: br, supported: [gzip]") {
		t.Fatalf("%d %s", status, body)
	}
	response, body := b.fetch("packed", "Accept-Encoding", "gzip, deflate, br")
	if response.Header.Get("Content-Encoding") != "gzip" || response.Header.Get("Vary") == "" {
		t.Fatalf("%v", response.Header)
	}
	reader, err := gzip.NewReader(strings.NewReader(body))
	must(t, err)
	if got, err := io.ReadAll(reader); err != nil || string(got) != content {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	for header, encoding := range map[string]string{"": "", "identity": "", "br": "", "gzip;q=0": "", "*": "", "identity;q=0, *": "gzip", "GZIP;q=0.5": "gzip", "identity, gzip;q=0.5": ""} {
		response, _ := b.fetch("packed", "Accept-Encoding", header)
		if response.StatusCode != 200 || response.Header.Get("Content-Encoding") != encoding {
			t.Errorf("%q: %d %v", header, response.StatusCode, response.Header)
		}
	}
	for _, header := range []string{"identity;q=0", "identity;q=0, br", "*;q=0", "gzip;q=0, *;q=0"} {
		response, body := b.fetch("packed", "Accept-Encoding", header)
		if response.StatusCode != 406 || body != `{"code":406,"message":"no acceptable encoding found, supported: [identity, gzip]"}` {
			t.Errorf("%q: %d %s", header, response.StatusCode, body)
		}
	}
}

func TestDownload(t *testing.T) {
	b := newBox(t)
	_, _ = b.put("data.json", `{"a":"0123456789"}`)
	response, body := b.fetch("data.json")
	if response.StatusCode != 200 || body != `{"a":"0123456789"}` || response.Header.Get("Content-Type") != "application/json" || response.ContentLength != 18 {
		t.Fatalf("%d %s %v", response.StatusCode, body, response.Header)
	}
	for header, want := range map[string]string{"bytes=6-9": "0123", "bytes=-3": `9"}`, "bytes=16-": `"}`} {
		// A range is answered in identity, whatever is accepted.
		response, body := b.fetch("data.json", "Range", header, "Accept-Encoding", "gzip")
		if response.StatusCode != 206 || body != want || response.Header.Get("Content-Encoding") != "" {
			t.Errorf("%s: %d %q %v", header, response.StatusCode, body, response.Header)
		}
	}
	if response, _ := b.fetch("data.json", "Range", "bytes=100-"); response.StatusCode != 416 {
		t.Fatal(response.StatusCode)
	}
	modified := response.Header.Get("Last-Modified")
	if response, body := b.fetch("data.json", "If-Modified-Since", modified, "Accept-Encoding", "gzip"); response.StatusCode != 304 || body != "" {
		t.Fatalf("%d %s", response.StatusCode, body)
	}
	_, _ = b.put("empty", "")
	if response, body := b.fetch("empty"); response.StatusCode != 200 || body != "" {
		t.Fatalf("%d %s", response.StatusCode, body)
	}
	// Files under /proc have no size and yet content.
	if response, body := b.fetch("/proc/self/status"); response.StatusCode != 200 || !strings.HasPrefix(body, "Name:") {
		t.Fatalf("%d %s", response.StatusCode, body)
	}
	if response, _ := b.fetch("data"); response.Header.Get("Content-Type") != "application/json" {
		t.Fatal(response.Header)
	}
}

func TestDownloadRefusals(t *testing.T) {
	b := newBox(t)
	must(t, unix.Mkfifo(b.home+"/fifo", 0o666))
	for path, want := range map[string]string{
		"missing":      `{"code":404,"message":"path '` + b.home + `/missing' does not exist"}`,
		"fifo/x":       `{"code":404,"message":"path '` + b.home + `/fifo/x' does not exist"}`,
		"":             `{"code":400,"message":"path '` + b.home + `' is a directory"}`,
		"~":            `{"code":400,"message":"path '` + b.home + `' is a directory"}`,
		"fifo":         `{"code":400,"message":"path '` + b.home + `/fifo' is not a regular file"}`,
		"/dev/zero":    `{"code":400,"message":"path '/dev/zero' is not a regular file"}`,
		"../home/../x": `{"code":404,"message":"path '` + b.root + `/x' does not exist"}`,
	} {
		if response, body := b.fetch(path); body != want || fmt.Sprintf(`{"code":%d`, response.StatusCode) != body[:11] {
			t.Errorf("%q: %d %s", path, response.StatusCode, body)
		}
	}
	if status, body := b.get("/files" + query("path", "x", "username", "ghost")); status != 401 || !strings.Contains(body, "error looking up user 'ghost'") {
		t.Fatalf("%d %s", status, body)
	}
}

func TestMetadataBelongsToTheUpload(t *testing.T) {
	b := newBox(t)
	status, body := b.put("m", "x", "X-Metadata-Author", "mish", "x-metadata-purpose", "up load")
	if status == 500 && strings.Contains(body, "not supported") {
		t.Skip("the file system of the temporary directory has no user attributes: set TMPDIR to one that has")
	}
	if status != 200 || !strings.Contains(body, `"metadata":{"author":"mish","purpose":"up load"}`) {
		t.Fatalf("%d %s", status, body)
	}
	stat := func() map[string]string {
		var got struct {
			Entry struct{ Metadata map[string]string }
		}
		if e := b.unary("filesystem.Filesystem/Stat", m{"path": "m"}, &got); e != nil {
			t.Fatal(e)
		}
		return got.Entry.Metadata
	}
	if got := stat(); !reflect.DeepEqual(got, map[string]string{"author": "mish", "purpose": "up load"}) {
		t.Fatalf("%v", got)
	}
	_, _ = b.put("m", "x", "X-Metadata-Author", "other")
	if got := stat(); !reflect.DeepEqual(got, map[string]string{"author": "other"}) {
		t.Fatalf("%v", got)
	}
	// What a program in the sandbox sets below the prefix shows; other attributes stay.
	must(t, unix.Setxattr(b.home+"/m", "user.e2b.own", []byte("1"), 0))
	must(t, unix.Setxattr(b.home+"/m", "user.foreign", []byte("1"), 0))
	if got := stat(); !reflect.DeepEqual(got, map[string]string{"author": "other", "own": "1"}) {
		t.Fatalf("%v", got)
	}
	if _, body := b.put("m", "x"); strings.Contains(body, "metadata") {
		t.Fatal(body)
	}
	if got := stat(); got != nil {
		t.Fatalf("%v", got)
	}
	if _, err := unix.Getxattr(b.home+"/m", "user.foreign", nil); err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("k", 246)
	if status, body := b.put("long", "x", "X-Metadata-"+long, "v"); status != 200 || !strings.Contains(body, long) {
		t.Fatalf("%d %s", status, body)
	}
	for name, header := range map[string][2]string{
		"key":   {"X-Metadata-" + long + "k", "v"},
		"total": {"X-Metadata-k", strings.Repeat("v", 4096-len("user.e2b.k")+1)},
		"value": {"X-Metadata-k", "ümlaut"},
		"empty": {"X-Metadata-", "v"},
	} {
		if status, body := b.put("refused", "x", header[0], header[1]); status != 400 || !strings.Contains(body, "metadata") {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
	if _, err := os.Stat(b.home + "/refused"); err == nil {
		t.Fatal("a refused upload left a file")
	}
}

func TestCompose(t *testing.T) {
	b := newBox(t)
	for name, content := range map[string]string{"p1": "one ", "p2": "two ", "p3": "three"} {
		_, _ = b.put(name, content)
	}
	compose := func(body m) (int, string) {
		text, _ := json.Marshal(body)
		r := b.request("POST", "/files/compose", bytes.NewReader(text))
		r.Header.Set("Content-Type", "application/json")
		return b.do(r)
	}
	status, body := compose(m{"source_paths": []string{"p1", "~/p2", b.home + "/p3"}, "destination": "new/dir/whole"})
	if status != 200 || body != fmt.Sprintf(`{"path":"%s/new/dir/whole","name":"whole","type":"file"}`, b.home) {
		t.Fatalf("%d %s", status, body)
	}
	content, err := os.ReadFile(b.home + "/new/dir/whole")
	must(t, err)
	if uid, gid, mode := owner(t, b.home+"/new/dir/whole"); string(content) != "one two three" || uid != userUID || gid != userGID || mode != 0o644 {
		t.Fatalf("%q %d:%d %o", content, uid, gid, mode)
	}
	if items, _ := os.ReadDir(b.home); len(items) != 1 {
		t.Fatalf("parts are left: %v", items)
	}
	_, _ = b.put("p1", "1")
	for name, c := range map[string]struct {
		body    m
		status  int
		message string
	}{
		"none":      {m{"destination": "d"}, 400, "source_paths must not be empty"},
		"nowhere":   {m{"source_paths": []string{"p1"}}, 400, "destination is required"},
		"missing":   {m{"source_paths": []string{"p1", "p9"}, "destination": "d"}, 404, "source file not found: p9"},
		"itself":    {m{"source_paths": []string{"p1"}, "destination": "./p1"}, 400, "cannot be the same as destination"},
		"directory": {m{"source_paths": []string{"new"}, "destination": "d"}, 400, "source path is not a regular file: new"},
		"onto dir":  {m{"source_paths": []string{"p1"}, "destination": "new"}, 400, "path is a directory"},
		"user":      {m{"source_paths": []string{"p1"}, "destination": "d", "username": "ghost"}, 401, "error looking up user 'ghost'"},
	} {
		if status, body := compose(c.body); status != c.status || !strings.Contains(body, c.message) {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
	if items, _ := os.ReadDir(b.home); len(items) != 2 {
		t.Fatalf("%v", items)
	}
	if status, _ := b.do(b.request("POST", "/files/compose", strings.NewReader("{"))); status != 400 {
		t.Fatal(status)
	}
}

// sign makes the signature that the SDKs put into URLs.
func signature(path, operation, user, token, expiration string) string {
	text := path + ":" + operation + ":" + user + ":" + token
	if expiration != "" {
		text += ":" + expiration
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + strings.TrimRight(base64.StdEncoding.EncodeToString(sum[:]), "=")
}

func TestSignedURLs(t *testing.T) {
	b := newBox(t)
	_, _ = b.put("f", "content")
	b.init(map[string]any{"access_token": "tok", "default_user": "user"})
	future, past := fmt.Sprint(time.Now().Unix()+60), fmt.Sprint(time.Now().Unix()-60)
	for name, c := range map[string]struct {
		url    string
		status int
		body   string
	}{
		"nothing":       {query("path", "f"), 401, `{"code":401,"message":"missing signature query parameter"}`},
		"good":          {query("path", "f", "signature", signature("f", "read", "", "tok", "")), 200, "content"},
		"named user":    {query("path", "f", "username", "user", "signature", signature("f", "read", "user", "tok", "")), 200, "content"},
		"other user":    {query("path", "f", "username", "root", "signature", signature("f", "read", "user", "tok", "")), 401, `{"code":401,"message":"invalid signature"}`},
		"until":         {query("path", "f", "signature", signature("f", "read", "", "tok", future), "signature_expiration", future), 200, "content"},
		"expired":       {query("path", "f", "signature", signature("f", "read", "", "tok", past), "signature_expiration", past), 401, `{"code":401,"message":"signature is already expired"}`},
		"longer":        {query("path", "f", "signature", signature("f", "read", "", "tok", past), "signature_expiration", future), 401, `{"code":401,"message":"invalid signature"}`},
		"for ever":      {query("path", "f", "signature", signature("f", "read", "", "tok", past)), 401, `{"code":401,"message":"invalid signature"}`},
		"not a number":  {query("path", "f", "signature", signature("f", "read", "", "tok", past), "signature_expiration", "x"), 401, `{"code":401,"message":"invalid signature expiration"}`},
		"other path":    {query("path", "g", "signature", signature("f", "read", "", "tok", "")), 401, `{"code":401,"message":"invalid signature"}`},
		"write to read": {query("path", "f", "signature", signature("f", "write", "", "tok", "")), 401, `{"code":401,"message":"invalid signature"}`},
		"other token":   {query("path", "f", "signature", signature("f", "read", "", "tik", "")), 401, `{"code":401,"message":"invalid signature"}`},
	} {
		if status, body := b.get("/files" + c.url); status != c.status || body != c.body {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
	if status, body := b.form("/files"+query("path", "up", "signature", signature("up", "write", "", "tok", "")), [2]string{"x", "new"}); status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	if status, _ := b.form("/files"+query("path", "up", "signature", signature("up", "read", "", "tok", "")), [2]string{"x", "new"}); status != 401 {
		t.Fatal(status)
	}
	b.headers.Set("X-Access-Token", "tok")
	if status, body := b.get("/files" + query("path", "up")); status != 200 || body != "new" {
		t.Fatalf("%d %s", status, body)
	}
	// A wrong token is not saved by a good signature.
	b.headers.Set("X-Access-Token", "tik")
	status, body := b.get("/files" + query("path", "f", "signature", signature("f", "read", "", "tok", "")))
	if status != 401 || body != `{"code":401,"message":"access token present in header but does not match"}` {
		t.Fatalf("%d %s", status, body)
	}
}

// smallDisk mounts a file system of 1 MiB for the test.
func (b *box) smallDisk() string {
	b.t.Helper()
	dir := b.home + "/small"
	must(b.t, os.Mkdir(dir, 0o777))
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,mode=0777"); err != nil {
		b.t.Skipf("cannot mount a small tmpfs here: %v", err)
	}
	b.t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

func TestFullDisk(t *testing.T) {
	b := newBox(t)
	dir := b.smallDisk()
	const full = `{"code":507,"message":"not enough disk space available"}`
	big := strings.Repeat("x", 16<<20)
	if status, body := b.put("small/big", big); status != 507 || body != full {
		t.Fatalf("%d %s", status, body)
	}
	if status, body := b.form("/files", [2]string{"small/big", big}); status != 507 || body != full {
		t.Fatalf("%d %s", status, body)
	}
	// What was cut off is gone, so there is room again.
	if status, body := b.put("small/fits", big[:700<<10]); status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	_, _ = b.put("part", big[:700<<10])
	text := `{"source_paths":["part"],"destination":"small/joined"}`
	if status, body := b.do(b.request("POST", "/files/compose", strings.NewReader(text))); status != 507 || body != full {
		t.Fatalf("%d %s", status, body)
	}
	if items, _ := os.ReadDir(dir); len(items) != 1 {
		t.Fatalf("%v", items)
	}
	if _, err := os.Stat(b.home + "/part"); err != nil {
		t.Fatal("a failed compose lost its source")
	}
	// The disk is full; commands and reads go on.
	_ = os.WriteFile(dir+"/rest", []byte(big[:1<<20]), 0o644)
	if r := b.sh("echo x > small/y || echo full"); r.out != "full\n" {
		t.Fatalf("%+v", r)
	}
	if response, body := b.fetch("small/fits"); response.StatusCode != 200 || len(body) != 700<<10 {
		t.Fatal(response.StatusCode)
	}
}

func TestLargeFilesComeBackWhole(t *testing.T) {
	b := newBox(t)
	content := make([]byte, 30<<20)
	for i := range content {
		content[i] = byte(i * i >> 8)
	}
	if status, body := b.put("large", string(content)); status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	if _, body := b.fetch("large"); body != string(content) {
		t.Fatalf("%d bytes", len(body))
	}
}
