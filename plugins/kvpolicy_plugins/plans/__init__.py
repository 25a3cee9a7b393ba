"""Plans that use several of the policies in this package."""
