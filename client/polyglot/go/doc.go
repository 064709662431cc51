// Package fencepost takes locks of a Fencepost server, keeps them, and stops the work when one is lost.
//
// A lock is a lease: it can be lost at any time. Only a resource that compares the fencing token with every write is safe
// from a holder that does not know yet; the README has such a write.
package fencepost

//go:generate ./generate.sh
