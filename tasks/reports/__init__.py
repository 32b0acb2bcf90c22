"""Reports of a run, made from its artifacts alone: pages, plots, tables and the report of each iteration.

samples           stored tables of samples joined
groups            each group best sample first, with outputs and what was recorded of its actions
images            stored images by sample id, targets, images as data links
text              excerpts, Markdown, numbers and sparklines
report            what a command says, for the terminal, Markdown and pages alike
metric_titles     the table of metrics (metrics.csv): title, meaning, where each is shown
iteration         the report and the table of each iteration in Prefect's UI
heldout           the held-out samples before and after training, as a sheet of images or a page of texts
run_page          a run as one HTML file
hacking           whether a run hacks its reward, with reasons
comparison        runs with their held-out samples paired; compare_page has its report and page
compared_runs     settings, curves and rewards that runs have in common or not
pairing           paired differences and their confidence intervals
rescoring         what changed when rollouts were scored again, and its page
reward_analysis   the analysis of each reward; reward_page has its report and page
statistics        columns checked and rounded, spread, rank correlation, quantiles
pages, templates  the base of all pages
plots             the look of all plots, and those of pages; reward_plots has that of the guardrails, which a run keeps
"""
