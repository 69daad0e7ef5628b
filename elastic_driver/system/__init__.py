"""What this project asks of the operating system and of the event loop, beside sockets and processes of its own."""
