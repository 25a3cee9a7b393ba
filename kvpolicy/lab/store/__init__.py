"""Result folders: samples as JSON lines, manifests, locks."""
