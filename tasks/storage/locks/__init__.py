"""One writer for a run: file locks on a disk, leases in a bucket."""
