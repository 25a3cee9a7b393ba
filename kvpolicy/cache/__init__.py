"""Where rows live: slabs, the view hooks get of them, where new rows go."""
