package edge

import (
	"fmt"
	"io"
	"net/http"
	"testing"
)

func TestRequestsReachTheSandboxThatTheyName(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	g := newGuest(t)
	control.put(g.serveGuest(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "guest %s %s", r.Method, r.URL.RequestURI())
	})))
	port := g.serve(0, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "user %s %s", r.URL.RequestURI(), r.Host)
	}))

	response, body := te.get(t, "/health?a=1", g.id, 0)
	expect(t, response, body, 200, "guest GET /health?a=1")
	response, body = te.get(t, "/x", g.id+"-client0", 49983)
	expect(t, response, body, 200, "guest GET /x")
	response, body = te.get(t, "/y", g.id, port)
	expect(t, response, body, 200, "user /y "+te.address)

	for _, host := range []string{
		fmt.Sprintf("%d-%s.sandboxes.test", port, g.id), fmt.Sprintf("%d-%s.Sandboxes.Test:3000", port, g.id),
		fmt.Sprintf("%d-%s.localhost:8443", port, g.id), fmt.Sprintf("%d-%s.sbx.localhost", port, g.id),
		fmt.Sprintf("%d-%s-abc.localhost", port, g.id),
	} {
		r, _ := http.NewRequest(http.MethodGet, te.url+"/h", nil)
		r.Host = host
		response, body = do(t, r)
		expect(t, response, body, 200, "user /h "+host)
	}

	r, _ := http.NewRequest(http.MethodGet, fmt.Sprintf("%s/atoll/sandbox/%s/%d/a%%2Fb//c?q=%%20", te.url, g.id, port), nil)
	response, body = do(t, r)
	expect(t, response, body, 200, "user /a%2Fb//c?q=%20 "+te.address)
	r, _ = http.NewRequest(http.MethodGet, fmt.Sprintf("%s/atoll/sandbox/%s/49983", te.url, g.id), nil)
	response, body = do(t, r)
	expect(t, response, body, 200, "guest GET /")
}

func TestRefusals(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	g := newGuest(t)
	control.put(g.serveGuest(say("guest")))

	response, body := te.get(t, "/health", "iaaaaaaaaaaaaaaaaaaaa", 0)
	expect(t, response, body, 502, `{"sandboxId":"iaaaaaaaaaaaaaaaaaaaa","message":"The sandbox was not found","code":502}`)
	response, body = te.get(t, "/", g.id, 9)
	expect(t, response, body, 502, `{"sandboxId":"`+g.id+`","message":"The sandbox is running but port is not open","port":9,"code":502}`)
	for _, bad := range []string{"UPPER", "a_b", "../x", "a-b-C"} {
		response, body = te.get(t, "/", bad, 0)
		expect(t, response, body, 400, `{"message":"Invalid sandbox ID","code":400}`)
	}
	for _, bad := range []string{"0", "65536", "http", "-1", "999999999999"} {
		r := te.request(t, http.MethodGet, "/", g.id, 0, nil)
		r.Header.Set(headerPort, bad)
		response, body = do(t, r)
		expect(t, response, body, 400, `{"message":"Invalid sandbox port","code":400}`)
	}
	r := te.request(t, http.MethodGet, "/", g.id, 9, nil)
	r.Header.Set("Accept", "text/html,application/xhtml+xml")
	response, body = do(t, r)
	if response.StatusCode != 502 || response.Header.Get("Content-Type") != "text/html; charset=utf-8" ||
		!containsAll(body, "<!doctype html>", "port is not open", g.id) {
		t.Fatalf("no page for a browser: %d %s", response.StatusCode, body)
	}
}

func TestAPIRequestsGoToControl(t *testing.T) {
	control := newFakeControl(t)
	te := startEdge(t, control)
	control.setAPI(func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		w.WriteHeader(201)
		fmt.Fprintf(w, "%s %s %s %s %s", r.Method, r.URL.RequestURI(), text, r.Header.Get("X-Forwarded-For"), r.Header.Get("X-Api-Key"))
	})
	r, _ := http.NewRequest(http.MethodPost, te.url+"/v2/sandboxes?x=1", newReader("body"))
	r.Header.Set("X-API-Key", "k")
	response, body := do(t, r)
	expect(t, response, body, 201, "POST /v2/sandboxes?x=1 body 127.0.0.1 k")
	for _, path := range []string{"/internal/edge/v1/locate", "//internal/x", "/%69nternal/x", "/a/../internal", "/agent/v1/poll", "/AGENT/x"} {
		r, _ := http.NewRequest(http.MethodGet, te.url+path, nil)
		if response, body := do(t, r); response.StatusCode != 404 {
			t.Errorf("%s: %d %s", path, response.StatusCode, body)
		}
	}
}
