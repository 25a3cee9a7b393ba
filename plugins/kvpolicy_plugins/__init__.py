"""Add-ons that combine with any policy, one file each."""
