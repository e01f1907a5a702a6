"""The engine of live objects, beside the engine that it replaces."""
