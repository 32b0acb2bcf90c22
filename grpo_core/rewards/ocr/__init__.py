"""Text in images: what the prompt asks for, what an engine reads, and how near the two are."""
