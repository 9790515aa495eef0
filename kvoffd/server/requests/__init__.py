"""What each request does. One function per message: ``(service, session, message) -> reply or None``."""
