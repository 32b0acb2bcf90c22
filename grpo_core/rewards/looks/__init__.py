"""What a picture looks like, whatever it shows: measured without a prompt, a target or a learned model."""
