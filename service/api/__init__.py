"""HTTP: one router per resource, which only translates to use cases and back."""
