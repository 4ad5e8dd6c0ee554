"""The properties that each exercise task must have, one module a notebook."""
