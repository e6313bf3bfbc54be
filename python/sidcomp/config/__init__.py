"""What a user may say: settings, rules for parameters, schedules, groups, exchanges."""
