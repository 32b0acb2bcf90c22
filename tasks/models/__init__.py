"""The policy that a process keeps in memory, and the files of models."""
