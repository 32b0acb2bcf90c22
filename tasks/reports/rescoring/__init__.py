"""What changed when stored rollouts were scored again: rewards, ranks and advantages, before and after.

records     the comparison, once made
compare     samples with both sides -> the comparison
joint       how often which previous and later reward met
moved       the samples whose rank moved most
table       the comparison as rows of text, for a terminal and for the page
drawings    geometry of its charts
page        the comparison as one HTML file
"""
