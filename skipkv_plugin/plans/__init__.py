"""Plans: SkipKV's defaults, the authors' settings, and those chosen for the bundled reasoners."""
