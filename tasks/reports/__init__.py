"""What a person sees of a run, made from its artifacts alone.

images    stored images by sample id, strips of thumbnails, the contact sheet
passages    texts shortened, and made harmless where they are shown
curve       metrics over iterations as a small drawing
iteration   the markdown report and the table that each iteration leaves in Prefect's UI
heldout     the held-out samples before and after training, as a sheet of images or a page of texts
artifact_reader   artifacts verified and never touched, for looking at a run that someone else may be writing
run_view          a run's folder -> these records
group_records     samples and their groups, once read
group_view        samples of an iteration or an evaluation, the best and worst of each group
target_reader     images that prompts ought to give
metric_titles     what each figure is, in plain words
chart             geometry of a line chart
page              a run as one HTML file
layout            what other pages share: head, style, figures as text
sample_frames     samples of any runs as a frame, before anything is reckoned from it
group_spread, group_ranks   how far siblings differ, and whether two scorings rank them alike
rescoring/         what changed when stored rollouts were scored again
rewards_analysis/  what each reward is worth, and the watch over guardrails
"""
