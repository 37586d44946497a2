"""What of a set of shards can be trained on, what is lost and why."""
