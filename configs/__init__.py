"""The shipped configuration files, what one may say (schema, checks for combinations), how it is read (loader)."""
