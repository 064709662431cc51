package fencepost

import (
	"time"

	"golang.org/x/sys/unix"
)

// now reads a monotonic clock that runs while the machine sleeps, which Go's own does not on Linux: an answer from
// before an hour of sleep must not look fresh.
func now() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic("fencepost: no CLOCK_BOOTTIME: " + err.Error()) // since Linux 2.6.39
	}
	return time.Duration(t.Nano())
}
