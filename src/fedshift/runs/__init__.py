"""From an experiment to run folders and served clients: plan, train, evaluate, open again."""
