export function keptView() {}
