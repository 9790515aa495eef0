"""The wire between kvoffd and its clients. Imports msgspec only."""
