"""Names of the files in a policy checkpoint."""

OPTIMIZER_FILE = "optimizer.safetensors"


STATE_FILE = "training_state.json"
