"""Programs that a model wrote, run where they can reach nothing but their input and output."""
