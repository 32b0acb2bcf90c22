"""What a person sees of a run, made from its artifacts alone.

pictures    stored pictures by sample id, strips of thumbnails, the contact sheet
curve       metrics over iterations as a small drawing
iteration   the markdown report and the table that each iteration leaves in Prefect's UI
"""
