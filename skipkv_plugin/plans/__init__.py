"""Plans: SkipKV's defaults and the settings of its authors."""
