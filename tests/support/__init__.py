"""What tests share: factories, models of what is tested, servers and runs to test against."""
