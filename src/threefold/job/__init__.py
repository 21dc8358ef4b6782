"""What the user states: the job, its model, cluster and parallelism, and the rules that judge them (pure)."""
