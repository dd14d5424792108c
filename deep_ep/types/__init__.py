"""What calls take and return: configurations, events, handles, integers."""
