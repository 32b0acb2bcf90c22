"""The reward laboratory: what each reward is worth as a teacher, from stored scores alone.

records          the analysis, once made
quantiles        where values lie, and how they are spread over bins
analyse          scores in long form -> the analysis
agreement        how far two rewards want the same
noise            the same sample scored twice
findings         what a person should look at, in words
table            the analysis as rows of text, for a terminal and for the page
figures          a drawing without any global state, and its PNG
panels           one small drawing a reward, side by side
side_labels      names beside the ends of lines, none upon another
histograms, agreement_plot, trend_plot, cost_plot
                 the plots of an analysis
plots            all of them, by file name
watch_plot       reward against guardrails over policy versions
page             the analysis as one HTML file
"""
