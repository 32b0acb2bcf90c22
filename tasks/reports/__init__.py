"""Reports of a run, made from its artifacts alone: pages, plots, tables and the report of each iteration.

images            stored images by sample id, images as data links, the contact sheet
text              excerpts, Markdown, numbers and sparklines
metric_titles     the title and meaning of every metric, and the one table of them
samples           stored tables of samples joined, and each group best sample first
statistics        columns checked and rounded, spread, rank correlation, quantiles
iteration         the report and the table of each iteration in Prefect's UI
heldout           the held-out samples before and after training, as a sheet of images or a page of texts
run_page          a run as one HTML file
rescoring         what changed when rollouts were scored again; read by rescoring_samples, shown by rescoring_page
reward_analysis   statistics of each reward; read by reward_scores, shown by reward_page
watch_plot        the reward against guardrails
pages, templates  the base of all pages
target_reader     target images of prompts
plots             the look of all plots; imported only where something is plotted, as are rescoring_plots, reward_plots
"""
