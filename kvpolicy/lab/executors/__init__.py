"""Where the jobs of a sweep run: this process, worker processes, Ray."""
