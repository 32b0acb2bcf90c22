"""What people read about runs: tables, curves, images and pages.

report            what a command says, for the terminal, Markdown and pages alike; templates/ has the pages' base
groups            stored tables of samples joined, each group best first
images            stored images by sample id, targets, images as data links
text              excerpts, Markdown, numbers, sparklines; metrics.csv has title and meaning of each metric
iteration         the report of each iteration in Prefect's UI
heldout           the held-out samples before and after training: a contact sheet, or a page of texts
run_page          a run as one HTML file; whether the run hacks its reward, with reasons
list_page         many runs as one HTML file, the seeds of a configuration as one band
comparison        runs with their held-out samples paired; compare_page has its report and page
compared_runs     settings, curves and rewards that runs have in common; paired differences with intervals
rescoring         what changed when rollouts were scored again, and its page
reward_analysis   the analysis of each reward, its report and page
statistics        columns checked and rounded, spread, rank correlation, quantiles
curves            plots of pages as SVG: lines over iterations, bars, squares
fonts             text of any script in images: fonts of this machine, lines, pixels
"""
