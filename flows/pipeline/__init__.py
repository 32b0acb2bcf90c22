"""What every flow shares: an opened run, how a stage is called, the forms of the UI."""
