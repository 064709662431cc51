//go:build !linux

package fencepost

import "time"

var start = time.Now()

// now reads the best monotonic clock that Go has here.
func now() time.Duration { return time.Since(start) }
