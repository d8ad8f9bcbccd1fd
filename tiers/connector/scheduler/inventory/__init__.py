"""What a tier was announced to hold: kept beside its blocks, announced again after a restart."""
