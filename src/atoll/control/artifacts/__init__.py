"""What lies in the artifact store, and how hosts get it: templates, manifests, layers, moments."""
