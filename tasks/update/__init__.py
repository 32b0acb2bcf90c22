"""Stage 4: stored rollouts and advantages become the next policy version."""
