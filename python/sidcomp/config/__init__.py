"""Everything that a user may set: settings, rules for parameters, schedules, groups, exchanges."""
