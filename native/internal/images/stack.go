package images

import (
	"context"
	"errors"
	"path/filepath"
	"strconv"

	"atoll.local/native/internal/images/unpack"
)

// stack puts an image's layers, from first on, on top of each other.
//
// Theory of operation. Layers are read side by side, in their order and at most `parallel` at a time, each as it comes where it is
// fetched. The first goes straight into the tree; the others are staged (package unpack) and put on top in their order when they have been
// read to their end and are what they should be: by renames, so that nothing is written twice. The tree itself appears only when all are
// in. Source: docs/adr/0029.
type stack struct {
	store  *Store
	image  *Image
	config *Config
	how    Making
	first  int
	// beside is a directory on the tree's file system, where layers are staged.
	beside string
}

// into answers the tree's entries and bytes.
func (s *stack) into(ctx context.Context, rootfs string) (entries, size int64, err error) {
	tree, err := unpack.OpenTree(rootfs)
	if err != nil {
		return 0, 0, err
	}
	defer tree.Close()
	if err := s.fill(ctx, tree); err != nil {
		return 0, 0, err
	}
	if entries, size, err = tree.Count(); err != nil {
		return 0, 0, failure(CodeInternal, err, "the tree cannot be counted")
	}
	return entries, size, nil
}

func (s *stack) fill(ctx context.Context, tree *unpack.Tree) error {
	if s.how.Told == nil {
		s.how.Told = func(string, int, Descriptor) {}
	}
	layers := s.image.Layers[s.first:]
	ready := make([]chan *unpack.Staged, len(layers))
	for i := range ready {
		ready[i] = make(chan *unpack.Staged, 1)
	}
	if len(layers) > 0 && s.first == s.image.outside {
		if err := s.furnish(tree); err != nil {
			return err
		}
	}
	meter := &unpack.Meter{Limits: s.how.Limits}
	ctx, cancel := context.WithCancelCause(ctx)
	read := make(chan error, 1)
	go func() {
		err := each(ctx, layers, func(ctx context.Context, i int, says func(string)) error {
			return s.read(ctx, i, tree, meter, ready[i], func() { says("fetched") })
		}, func(event string, i int, blob Descriptor) { s.how.Told(event, s.first+i, blob) })
		if err != nil {
			cancel(err)
		}
		read <- err
	}()
	err := s.place(ctx, tree, meter, ready)
	defer cancel(nil)
	if err != nil {
		cancel(err)
	}
	// What is still being staged ends before anybody removes where it is.
	if failed := <-read; failed != nil && (err == nil || errors.Is(err, context.Canceled)) {
		err = failed
	}
	for _, one := range ready {
		select {
		case staged := <-one:
			if staged != nil {
				staged.Close()
			}
		default:
		}
	}
	return err
}

// read has one layer read to its end: into the tree, where it is the first, else beside it.
func (s *stack) read(ctx context.Context, i int, tree *unpack.Tree, meter *unpack.Meter, ready chan<- *unpack.Staged, came func()) error {
	var staged *unpack.Staged
	use := func(layer unpack.Layer) (err error) {
		if i == 0 {
			return tree.Apply(ctx, layer, meter)
		}
		staged, err = unpack.Stage(ctx, layer, meter, filepath.Join(s.beside, "layer-"+strconv.Itoa(i)))
		return err
	}
	var get getter
	if s.how.From != nil {
		get = blobsOf(s.how.From)
	}
	err := withLayer(ctx, s.store, get, s.image.Layers[s.first+i], s.config.RootFS.DiffIDs[s.first+i], came, use)
	if err != nil {
		if staged != nil {
			staged.Close()
		}
		return err
	}
	ready <- staged
	return nil
}

// place puts layers on top as they get ready, with what guests need below and above those that were captured in sandboxes.
func (s *stack) place(ctx context.Context, tree *unpack.Tree, meter *unpack.Meter, ready []chan *unpack.Staged) error {
	for i := 0; ; i++ {
		isLast := i == len(ready)
		// What comes below the first layer is in already.
		if isLast || (i > 0 && s.first+i == s.image.outside) {
			if err := s.furnish(tree); err != nil {
				return err
			}
		}
		if isLast {
			return nil
		}
		select {
		case staged := <-ready[i]:
			if staged == nil {
				continue
			}
			if err := tree.Place(ctx, staged, meter); err != nil {
				staged.Close()
				return err
			}
			if err := staged.Remove(); err != nil {
				return failure(CodeInternal, err, "what was staged cannot be removed")
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *stack) furnish(tree *unpack.Tree) error {
	return errors.Join(tree.Furnish(), tree.MakeDirectory(s.config.Config.WorkingDir))
}
