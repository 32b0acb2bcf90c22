"""What the commands print: progress bars, tables, plain text."""
