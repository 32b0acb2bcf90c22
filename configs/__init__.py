"""The shipped configuration files, what a configuration may say (schema) and how one is read (loader)."""
