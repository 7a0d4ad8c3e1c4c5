package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"atoll.local/native/internal/images"
	"atoll.local/native/internal/images/capture"
	"atoll.local/native/internal/images/unpack"
	"atoll.local/native/internal/objects"
)

const imageUsage = `usage: atoll-io image COMMAND [options]

commands:
  pull --store DIR --source SOURCE [--platform OS/ARCH] [--options FILE]
                                          have an image's blobs in the store
  fetch --store DIR --image DIGEST --options FILE [--documents]
                                          have an image of an object store in the store, or only what names its layers
  publish --store DIR --image DIGEST --options FILE
                                          have an image of the store in an object store
  inspect --store DIR --image DIGEST      describe an image of the store
  unpack --store DIR --image DIGEST --cache DIR [--base DIGEST --base-tree DIR] [--options FILE]
                                          have an image's root file system in the cache; with options, layers that the store
                                          has not are fetched from the object store, and unpacked as they come
  pack --target FILE (--upper DIR | --tar -)
                                          make a layer of what was written above an image

SOURCE: registry:REFERENCE, oci-layout:DIR[:TAG], docker-archive:FILE, archive:FILE[:TAG].
FILE holds JSON with username, password, token, mirrors, plainHttp, and for fetch and publish objects ("-": standard input).
Answers are JSON lines on standard output; the last one has "event": "done", or "failed" with a stable code.
`

// errSaid ends the program with status 1; why has been said on standard output.
var errSaid = errors.New("said")

// imageCommand holds what the image commands are told.
type imageCommand struct {
	store, source, platform, options, image, cache string
	base                                           images.Base
	upper, tar, target                             string
	documents                                      bool
	limits                                         unpack.Limits
}

func runImage(ctx context.Context, args []string) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, imageUsage)
		return errUsage
	}
	var c imageCommand
	flags := flag.NewFlagSet("atoll-io image", flag.ContinueOnError)
	flags.StringVar(&c.store, "store", "", "`DIR` of blobs")
	flags.StringVar(&c.source, "source", "", "where the image comes from")
	flags.StringVar(&c.platform, "platform", "", "`OS/ARCH`, otherwise this machine's")
	flags.StringVar(&c.options, "options", "", "`FILE` with credentials and mirrors")
	flags.StringVar(&c.image, "image", "", "`DIGEST` of the image's manifest")
	flags.StringVar(&c.cache, "cache", "", "`DIR` of root file systems")
	flags.StringVar(&c.base.Digest, "base", "", "`DIGEST` of the ready-made image that --base-tree is of")
	flags.StringVar(&c.base.Tree, "base-tree", "", "`DIR` with a ready-made image's root file system")
	flags.StringVar(&c.upper, "upper", "", "`DIR` that an overlay was written to")
	flags.StringVar(&c.tar, "tar", "", "`FILE` that gVisor has made (\"-\": standard input)")
	flags.BoolVar(&c.documents, "documents", false, "manifest and configuration only")
	flags.StringVar(&c.target, "target", "", "`FILE` for the layer")
	c.limits = unpack.DefaultLimits
	flags.Int64Var(&c.limits.Bytes, "bytes-max", c.limits.Bytes, "bytes of all files")
	flags.Int64Var(&c.limits.Entries, "entries-max", c.limits.Entries, "entries of all layers")
	if err := flags.Parse(args[1:]); err != nil {
		return errUsage
	}
	known := map[string]func(context.Context) (any, error){"pull": c.pull, "inspect": c.inspect, "unpack": c.unpack, "pack": c.pack, "fetch": c.fetch, "publish": c.publish}[args[0]]
	if known == nil || flags.NArg() > 0 || (c.store == "" && args[0] != "pack") {
		fmt.Fprint(os.Stderr, imageUsage)
		return errUsage
	}
	found, err := known(ctx)
	if err != nil {
		say(map[string]any{"event": "failed", "code": images.CodeOf(err), "message": err.Error()})
		return errSaid
	}
	say(map[string]any{"event": "done", "image": found})
	return nil
}

func (c *imageCommand) pull(ctx context.Context) (any, error) {
	platform, err := images.ParsePlatform(c.platform)
	if err != nil {
		return nil, err
	}
	options, err := readOptions(c.options)
	if err != nil {
		return nil, err
	}
	store, err := images.OpenStore(c.store)
	if err != nil {
		return nil, err
	}
	source, err := images.OpenSource(c.source, options)
	if err != nil {
		return nil, err
	}
	defer source.Close()
	return images.Pull(ctx, store, source, platform, c.limits, sayLayer)
}

func sayLayer(event string, layer int, blob images.Descriptor) {
	say(map[string]any{"event": event, "layer": layer, "digest": blob.Digest, "size": blob.Size})
}

func (c *imageCommand) fetch(ctx context.Context) (any, error) {
	options, err := readOptions(c.options)
	if err != nil {
		return nil, err
	}
	from, err := objects.OpenReader(options.Objects)
	if err != nil {
		return nil, &images.Error{Code: images.CodeInvalid, Text: err.Error()}
	}
	store, err := images.OpenStore(c.store)
	if err != nil {
		return nil, err
	}
	if c.documents {
		return images.FetchDocuments(ctx, store, from, c.image)
	}
	return images.Fetch(ctx, store, from, c.image, sayLayer)
}

func (c *imageCommand) publish(ctx context.Context) (any, error) {
	options, err := readOptions(c.options)
	if err != nil {
		return nil, err
	}
	to, err := objects.Open(options.Objects)
	if err != nil {
		return nil, &images.Error{Code: images.CodeInvalid, Text: err.Error()}
	}
	return images.Publish(ctx, images.ReadStore(c.store), to, c.image, sayLayer)
}

func (c *imageCommand) inspect(context.Context) (any, error) {
	return images.Inspect(images.ReadStore(c.store), c.image)
}

func (c *imageCommand) unpack(ctx context.Context) (any, error) {
	how := images.Making{Base: c.base, Limits: c.limits, Told: sayLayer}
	if c.options == "" {
		return images.Unpack(ctx, images.ReadStore(c.store), c.image, c.cache, how)
	}
	options, err := readOptions(c.options)
	if err != nil {
		return nil, err
	}
	if how.From, err = objects.OpenReader(options.Objects); err != nil {
		return nil, &images.Error{Code: images.CodeInvalid, Text: err.Error()}
	}
	store, err := images.OpenStore(c.store)
	if err != nil {
		return nil, err
	}
	return images.Unpack(ctx, store, c.image, c.cache, how)
}

// pack answers the layer in place of an image.
func (c *imageCommand) pack(ctx context.Context) (any, error) {
	if (c.upper == "") == (c.tar == "") || c.target == "" {
		return nil, &images.Error{Code: images.CodeInvalid, Text: "pack needs --target, and one of --upper and --tar"}
	}
	if c.upper != "" {
		return capture.FromUpper(ctx, c.upper, c.target, c.limits.Bytes)
	}
	source := os.Stdin
	if c.tar != "-" {
		file, err := os.Open(c.tar)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		source = file
	}
	return capture.FromTar(ctx, source, c.target, c.limits.Bytes)
}

const optionsBytesMax = 1 << 20

// readOptions never repeats what it could not read: it holds passwords.
func readOptions(name string) (options images.Options, err error) {
	if name == "" {
		return options, nil
	}
	file := os.Stdin
	if name != "-" {
		if file, err = os.Open(name); err != nil {
			return options, err
		}
		defer file.Close()
	}
	content, err := io.ReadAll(io.LimitReader(file, optionsBytesMax))
	if err != nil {
		return options, err
	}
	if json.Unmarshal(content, &options) != nil {
		return options, &images.Error{Code: images.CodeInvalid, Text: "the options are not JSON of the known form"}
	}
	return options, nil
}

func say(line map[string]any) {
	content, err := json.Marshal(line)
	if err == nil {
		_, _ = os.Stdout.Write(append(content, '\n'))
	}
}
