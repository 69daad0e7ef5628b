"""What tests share: see CONTRIBUTING.md."""
