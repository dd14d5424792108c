"""Why operations hang: what ranks say of themselves, the verdict, and dumps. Nothing here communicates."""
