"""`grpo sample`: draws or answers prompts at once, with a run's policy, an exported folder, or any model.

source    opens a run or a folder as a policy
sample    prompts -> texts, or images in files
"""
