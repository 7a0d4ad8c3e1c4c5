package edge

import (
	"io"
	"net/http"
	"sync"
	"testing"
	"time"
)

// asleep is the route of a sandbox that traffic may wake.
func asleep(awake Route) Route {
	awake.State, awake.Reach, awake.ConnectToken, awake.AutoResume = "suspended", Reach{Kind: reachDirect}, "", true
	return awake
}

func TestManyRequestsWakeASandboxOnceAndAllAreAnswered(t *testing.T) {
	const requests = 1000
	control := newFakeControl(t)
	te := startEdge(t, control)
	g := newGuest(t)
	awake := g.serveGuest(say("guest"))
	control.put(asleep(awake))
	release := make(chan struct{})
	control.wake = func(string) *Route {
		<-release
		back := awake
		back.Revision += 2
		control.put(back)
		return &back
	}
	transport := &http.Transport{DisableCompression: true, MaxConnsPerHost: 0}
	defer transport.CloseIdleConnections()
	var group sync.WaitGroup
	answers := make(chan string, requests)
	for range requests {
		group.Add(1)
		go func() {
			defer group.Done()
			response, err := transport.RoundTrip(te.request(t, http.MethodGet, "/health", g.id, 0, nil))
			if err != nil {
				answers <- err.Error()
				return
			}
			text, _ := io.ReadAll(response.Body)
			_ = response.Body.Close()
			answers <- response.Status + " " + string(text)
		}()
	}
	time.Sleep(300 * time.Millisecond)
	close(release)
	group.Wait()
	close(answers)
	for answer := range answers {
		if answer != "200 OK guest" {
			t.Fatal(answer)
		}
	}
	if asked := control.wakes.Load(); asked != 1 {
		t.Fatalf("control was asked %d times", asked)
	}
}

// Between the look that found it at rest and the wish to wake it, others' wish may have come true.
func TestWhatHasComeBackMeanwhileIsNotRefused(t *testing.T) {
	te, g, control := oneGuest(t, say("guest"))
	refusal := notFound(g.id)
	request := te.request(t, http.MethodGet, "/health", g.id, 0, nil)
	found, refused := te.rouse(request, target{sandboxID: g.id, port: publicGuestPort, url: request.URL}, &refusal)
	if refused != nil || found == nil || !found.ready() || control.wakes.Load() != 0 {
		t.Fatalf("%v %v", found, refused)
	}
}

func TestWhatMayNotBeWokenIsNotFound(t *testing.T) {
	control := newFakeControl(t)
	control.wake = func(string) *Route { return nil }
	te := startEdge(t, control)
	g := newGuest(t)
	route := asleep(g.serveGuest(say("guest")))
	route.AutoResume = false
	control.put(route)
	response, body := te.get(t, "/health", g.id, 0)
	expect(t, response, body, 502, `{"sandboxId":"`+g.id+`","message":"The sandbox was not found","code":502}`)
	if control.wakes.Load() != 0 {
		t.Fatal("control was asked")
	}
	route.AutoResume, route.Revision = true, route.Revision+1
	control.put(route)
	// The edge hears of it by its stream of changes, a moment later.
	for until := time.Now().Add(5 * time.Second); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		if response, body = te.get(t, "/health", g.id, 0); response.StatusCode != 502 {
			break
		}
	}
	expect(t, response, body, 503, `{"sandboxId":"`+g.id+`","message":"The sandbox is paused and cannot be resumed now; try again","code":503}`)
}

func TestOnlyWhoMayEnterWakes(t *testing.T) {
	control := newFakeControl(t)
	control.wake = func(string) *Route { return nil }
	te := startEdge(t, control)
	g := newGuest(t)
	route := asleep(g.serveGuest(say("guest")))
	digest := "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b" // of "secret"
	route.PublicTraffic, route.TrafficTokenSHA256 = false, &digest
	control.put(route)
	response, _ := te.get(t, "/", g.id, 8080)
	if response.StatusCode != http.StatusForbidden || control.wakes.Load() != 0 {
		t.Fatalf("%d, and control was asked %d times", response.StatusCode, control.wakes.Load())
	}
}

func TestNoMoreThanSoManyWait(t *testing.T) {
	release := make(chan struct{})
	control := newFakeControl(t)
	control.wake = func(string) *Route { <-release; return nil }
	te := startEdge(t, control)
	te.waker.max = 2
	g := newGuest(t)
	control.put(asleep(g.serveGuest(say("guest"))))
	waiting := make(chan int, 2)
	for range 2 {
		go func() {
			response, _ := te.get(t, "/health", g.id, 0)
			waiting <- response.StatusCode
		}()
	}
	for te.waker.held.Load() < 2 {
		time.Sleep(time.Millisecond)
	}
	response, _ := te.get(t, "/health", g.id, 0)
	if response.StatusCode != http.StatusServiceUnavailable {
		t.Fatal(response.StatusCode)
	}
	close(release)
	<-waiting
	<-waiting
}
