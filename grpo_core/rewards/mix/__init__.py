"""Several rewards of a sample become one."""
